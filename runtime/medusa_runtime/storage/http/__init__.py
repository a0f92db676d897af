"""An HTTP client for reading ranges: the store for web servers, and the connection that other stores use too."""
