"""Long runs under mixed load and faults: does memory, does anything else, grow with the number of requests?"""
