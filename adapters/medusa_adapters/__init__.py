"""The adapters, which make a function speak a platform's protocol, and the command line."""
