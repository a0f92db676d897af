"""Ray on one machine: how its processes are started, and the actor by which the controller reaches the node server."""
