"""Reports of rollouts: HTML pages for people; log trees and JSON rows for programs."""
