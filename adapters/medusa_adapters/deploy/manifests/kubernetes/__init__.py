"""Everything that kubectl or Helm applies: what a pod holds, what serves it, and what stands beside it."""
