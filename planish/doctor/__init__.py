"""The findings of `planish doctor`: facts about this machine, and a remedy for each problem.

The modules here call the code that planish itself uses, such as the choice of device and kernels.
So the findings describe what an engine on this machine would do.
"""
