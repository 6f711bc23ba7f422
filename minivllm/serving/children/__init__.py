"""Work on what clients give that may end a process or take it too long, done by mortal children."""
