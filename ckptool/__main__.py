"""``python -m ckptool``."""

from ckptool.cli import main

main()
