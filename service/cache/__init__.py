"""What a sequence keeps of its tokens: paged keys and values, and recurrent states."""
