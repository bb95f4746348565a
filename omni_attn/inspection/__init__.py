"""Looking at one sparse attention call of a run: what was selected, what it missed, how fast it was.

target     which layer is looked at, checked before any weight is loaded
capture    a pipeline's loop up to that call, and the tensors of the call
mass       dense attention beside it, in chunks: the mass that was kept, and the errors
speed      predicted and measured
figures    all of it as one record
pictures   block maps and mass, drawn with pillow
"""
