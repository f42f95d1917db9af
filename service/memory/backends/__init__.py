"""Where slabs come from: one file per kind of memory, behind one protocol."""
