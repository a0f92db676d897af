"""Decoder families, one file each; attribute names follow the checkpoint's tensor names."""
