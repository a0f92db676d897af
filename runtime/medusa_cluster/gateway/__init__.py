"""The entrance of a cluster: the OpenAI routes for every deployed model, over HTTP to the instances."""
