"""Ray on one machine: how its processes are started, and the actor through which the head reaches the node server."""
