"""`medusa batch`: a file of requests, in the form of OpenAI's Batch API, answered by one instance."""
