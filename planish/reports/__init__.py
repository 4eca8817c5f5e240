"""What was rolled out, for people and programs: pages, trees and summaries."""
