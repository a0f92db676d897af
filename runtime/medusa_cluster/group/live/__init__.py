"""Instances that help one another: live scaling, and prefill separated from decode."""
