"""What any room may use and what imports no other: errors, options, files, tensors, machine, progress, tables."""
