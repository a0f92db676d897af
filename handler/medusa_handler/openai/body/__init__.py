"""What a request body of the OpenAI interface may say: its fields, sampling parameters and form of answer."""
