"""Where slabs come from: one small file a kind of memory, behind one protocol."""
