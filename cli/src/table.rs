//! Aligned columns.

use std::fmt;

/// Rows of cells: the first `left` columns are aligned to the left, the others to the right.
pub struct Table {
    rows: Vec<Vec<String>>,
    left: usize,
}

impl Table {
    /// A table with a row of titles, or without titles if there are none.
    pub fn new(left: usize, titles: &[&str]) -> Self {
        let mut table = Table {
            rows: Vec::new(),
            left,
        };
        if !titles.is_empty() {
            table.row(titles.iter().map(|t| (*t).to_owned()));
        }
        table
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |c: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(c));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (c, (cell, width)) in row.iter().zip(&widths).enumerate() {
                line += "  ";
                line += &if c < self.left {
                    format!("{cell:<width$}")
                } else {
                    format!("{cell:>width$}")
                };
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Bytes in the largest binary unit that keeps them above 1.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if n < 1024 {
        return format!("{n} B");
    }
    let power = (n.ilog2() / 10).min(4);
    let scaled = n as f64 / 1024f64.powi(power as i32);
    let unit = UNITS[power as usize - 1];
    if scaled.fract() == 0.0 {
        format!("{scaled:.0} {unit}")
    } else {
        format!("{scaled:.1} {unit}")
    }
}

/// A count with a space after every three digits.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(' ');
        }
        out.push(digit);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_aligned() {
        let mut table = Table::new(1, &["name", "n"]);
        table.row(["a".to_owned(), "100".to_owned()]);
        assert_eq!(table.to_string(), "  name    n\n  a     100\n");
    }

    #[test]
    fn numbers() {
        let texts = [0, 1023, 1024, 1536, 192 << 30].map(bytes);
        assert_eq!(texts, ["0 B", "1023 B", "1 KiB", "1.5 KiB", "192 GiB"]);
        assert_eq!([7, 1234, 12345678].map(count), ["7", "1 234", "12 345 678"]);
    }
}
