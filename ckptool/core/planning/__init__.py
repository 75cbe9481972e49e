"""Pairing a catalog with a layout: which parts of files are written together, tile by tile."""
