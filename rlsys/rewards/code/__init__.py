"""The reward `code`: programs run against tests in the sandbox."""
