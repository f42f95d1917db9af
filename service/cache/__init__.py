"""What a token leaves behind, behind one protocol."""
