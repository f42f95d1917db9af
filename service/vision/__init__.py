"""From files and tensors to the patches that a vision tower reads; torch is used only for resizing and cutting."""
