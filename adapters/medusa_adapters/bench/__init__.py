"""`medusa bench`: measure this machine, ours and others in turn in one run, and write one common JSON form."""
