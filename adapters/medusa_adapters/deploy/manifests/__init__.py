"""The manifests of a function for each platform: plain values, checked before anything is applied."""
