"""Where bytes are stored: disks, and stores behind URLs.

All readers ask a ``Files`` (``files``). Of a disk that is ``local``, for which ``read_ahead`` asks
the kernel early. Of a store it is ``remote``, over ``store``: what was announced is fetched ahead
in large ranges (``planned_ranges``), small reads in blocks (``block_cache``). Each is a request,
which a client of ``clients`` sends and ``clients/retry`` repeats. ``note`` and ``commit_note`` are
what a run leaves for later ones.
"""
