"""One adapter a platform: pure translation between its protocol and ours."""
