"""A keeper: the one rank that a trainer broadcasts to, in place of a fleet's members, which may come and go behind it.

receive.py   groups of both dialects, and what comes through them
folder.py    what came, as a checkpoint that members read
app.py       its HTTP routes: a server's, as far as a broadcast goes, and the front's own
command.py   `tlt-server keeper`
"""
