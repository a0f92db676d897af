"""`medusa deploy`: a function on a platform."""
