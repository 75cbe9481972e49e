"""Move the bytes of tensors: all reading, writing and comparing is one loop over tiles.

A transfer claims its target (``write/stage``), with the notes and locks of ``write/disk_target`` or
``write/store_target``. Its plan is cut into jobs, by ``write/run`` for a disk, by ``write/send``
for a store; ``read/tiles`` does them on threads, ``read/planned`` makes the bytes of each, and
``write/output`` writes them. On the way ``checksum`` compares records with the CRC-32 that their
writer stored, and ``read/sums`` notes what was read: by that ``check/written`` and ``check/proof``
prove the output, before ``write/commit`` puts it in place.
"""
