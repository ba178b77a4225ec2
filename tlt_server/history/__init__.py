"""What earlier responses to a prompt said, as drafts for the next ones: nothing here knows of SGLang."""
