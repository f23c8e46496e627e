"""The signals that stop a command, and what its processes say by the number with which they end. PURE.

| code | meaning                                                                                                    |
|------|------------------------------------------------------------------------------------------------------------|
| 0    | all steps are done and saved                                                                               |
| 1    | the run failed; the message says why                                                                       |
| 2    | the run was refused before it started                                                                      |
| 75   | no step for too long: the stacks of all threads were printed; start it again, it resumes                   |
| 143  | SIGTERM, SIGUSR1 or SIGINT: stopped between two steps and saved; the same command goes on from there       |
|      | (also when `exit_duration_in_mins` have passed)                                                            |
| 128+ | the number of the signal that ended a process, 137 for SIGKILL: nothing was saved after the last checkpoint |
"""

import signal

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_STUCK = 75
EXIT_SIGNALLED = 143

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
