"""The gateway: the entrance of a cluster, with the OpenAI routes for every deployed model."""
