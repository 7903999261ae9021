"""`kvstore top`: a live view of a daemon in a terminal.

Flow: `command` polls `Stats` on its own connection, `history` keeps the answers of the last seconds
and makes rates of them, `frame` turns both into lines that fit the terminal, `keyboard` reads keys
without waiting for Enter. The daemon keeps nothing for a viewer: one that dies, or whose ssh
connection does, leaves nothing behind. A daemon that goes away ends the view with one line and exit
code 1; one that was restarted between two polls is shown on, its rates begin anew.
"""
