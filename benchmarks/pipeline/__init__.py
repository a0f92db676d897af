"""Cold starts by groups of workers, consolidation and live scaling, measured in a laboratory."""
