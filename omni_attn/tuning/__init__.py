"""Measuring on this machine: `bench` shows, `tune` writes a pipeline file, `verify` checks the installed kernels.

shapes       the named shapes
cases        one attention call to measure: geometry, record, tensors, reference
candidates   every registered backend and variant, accepted or refused with its reasons
clocks       time of a call on the device
measure      all candidates on one case, in alternating rounds
bench        the named shapes; how the platform default compares with the fastest
tune         the fastest backend within an error bound for each role of a pipeline
document     the tuned pipeline file
plot         the bar chart
verify       the conformance class on every usable backend
"""
