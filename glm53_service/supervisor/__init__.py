"""The supervisors: `lead` beside rank 0, `follow` beside every other rank, and the epoch protocol between
them.
"""
