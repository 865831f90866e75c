"""A plan as one HTML page that needs no network: ``data`` says what is on the page, ``html`` makes the page."""
