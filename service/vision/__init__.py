"""From files and tensors to the patches that a vision tower reads; torch is used for resizing and cutting only."""
