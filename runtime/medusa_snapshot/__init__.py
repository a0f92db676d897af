"""Snapshots: the memory of a process that has imported everything, saved in a file, from which others continue.

A process that continues from a snapshot has its modules without having executed them. That takes some milliseconds in
place of hundreds, and it shares the pages that it only reads with all others that continue from the same file. It needs
no privileges: the process saves itself (``kernels/source/snapshot/snapshot.c``), and the program medusa-resume
(``resume.c``) maps the file and the libraries to where they were. The idea is that of the start-up snapshots of Emacs
and V8, for a whole process.

``saving`` makes a snapshot, ``conditions`` says what has to be the same for it to be used, and ``resuming`` continues
from it. The last two are executed by a new process before anything else, so they import next to nothing.
"""
