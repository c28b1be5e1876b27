"""A real engine loop over sessiontree, small enough to read in an evening.

Begin with ``requests`` (the vocabulary), then ``scheduler`` (what runs when), ``pages`` and ``model`` (KV by page, attention
through the block table), ``encoder``, ``sampler``, ``text`` and ``engine`` (the thread). Vocabulary and weights are those of the
quickstart, ``examples/qwen_reference.py``.

In front of it: ``sessions`` and ``history`` (which node a request goes on from), ``generations`` (a reply on its way, and what is
done with it when it ends), ``chat`` and ``pictures`` (messages and uploads to tokens and media).

Around that, HTTP: ``schemas`` (what comes), ``native``, ``completions`` and ``responses`` (what goes), ``streams`` (waiting, while
the client does), ``tenants``, ``limits`` and ``failures`` (what is refused), ``service`` (all of it put together), ``server``
(routes), ``upkeep`` and ``figures``.
"""
