"""The viewer: a session as one page of HTML that needs nothing else, and the same page live over HTTP.

Nothing here knows a store. ``packing`` puts what is told of nodes, with arrays, into bytes that the page takes apart; ``runs`` says
positions by their runs; ``pictures`` makes thumbnails of features; ``page`` puts the page together from the files beside it;
``server`` serves it. :mod:`sessiontree.cli.viewed` says what a session is, and the commands ``view`` and ``serve`` use both.

What a session holds reaches the page as compressed bytes in base64 alone, and its scripts only ever make text of it. The page's
policy allows the scripts it was made with and nothing else: no other script, no request, no markup from text.
"""
