"""What clients send is read: by whom, in which order, and what becomes of what cannot be read.

Doors: `request_reading.RequestReading` for requests, `readers.Readers` for single questions. They
never read anything themselves: processes of their own do (`worker/reader.py`).
"""
