"""What any room may use and no library gives: durable files, processes, back-off, exit statuses."""
