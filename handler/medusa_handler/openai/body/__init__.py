"""Request bodies of the OpenAI interface: fields, sampling parameters and response formats."""
