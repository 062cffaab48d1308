"""Checking and timing: does this machine compute what it should, and how fast?"""
