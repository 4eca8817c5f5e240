"""The console: what runs did and are doing, in a browser, from the files of their directories"""
