"""What a batch has done so far, on disk beside its output: survives the death of its writer."""
