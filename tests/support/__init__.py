"""What several test files share. No test file imports another one."""
