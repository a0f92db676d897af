"""Instances that help one another: live scaling, and prefill apart from decode."""
