"""A real engine loop over sessiontree, small enough to read in an evening.

Begin with ``requests`` (the vocabulary), then ``scheduler`` (what runs when), ``pages`` and ``model`` (KV by page, attention
through the block table), ``encoder``, ``sampler``, ``text`` and ``engine`` (the thread). In front of it: ``sessions`` and
``history`` (which node a request goes on from), ``chat`` and ``pictures`` (messages and uploads to tokens and media), ``schemas``
and ``server`` (HTTP).
"""
