"""HTTP as a reader of ranges needs it: the store for web servers, and the connection that other stores use too."""
