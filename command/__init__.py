"""How a program of ours begins and ends, reads its options, and reads and writes files. Every other folder may use it.

    process.py    what is set before torch is loaded; errors that a user sees as one line; how a command ends
    options.py    a dataclass of options -> the command line; checks of numbers
    progress.py   what is shown while a program works
    files.py      reading JSON lines with one clear error for a broken one; replacing a file atomically;
                  a folder that one process keeps for itself
"""
