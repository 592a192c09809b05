//! Renders tables with aligned columns.

/// The alignment of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// Renders a header and rows. Missing cells are empty, and no line ends with a space.
pub(crate) fn render(columns: &[(&str, Align)], rows: &[Vec<String>]) -> String {
    let cell = |row: &[String], index: usize| row.get(index).cloned().unwrap_or_default();
    let width_of = |index: usize, title: &str| {
        rows.iter()
            .map(|row| cell(row, index).chars().count())
            .chain([title.chars().count()])
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> =
        columns.iter().enumerate().map(|(index, (title, _))| width_of(index, title)).collect();
    let line = |cells: Vec<String>| {
        let padded: Vec<String> = columns
            .iter()
            .zip(&widths)
            .zip(&cells)
            .map(|(((_, align), &width), cell)| match align {
                Align::Left => format!("{cell:<width$}"),
                Align::Right => format!("{cell:>width$}"),
            })
            .collect();
        padded.join("  ").trim_end().to_owned() + "\n"
    };
    let header = line(columns.iter().map(|(title, _)| (*title).to_owned()).collect());
    let rule = line(widths.iter().map(|width| "─".repeat(*width)).collect());
    let body = rows.iter().map(|row| line((0..columns.len()).map(|index| cell(row, index)).collect()));
    [header, rule].into_iter().chain(body).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [(&str, Align); 3] = [("row", Align::Left), ("p50", Align::Right), ("", Align::Left)];

    fn row(cells: &[&str]) -> Vec<String> {
        cells.iter().map(|cell| (*cell).to_owned()).collect()
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let text = render(&COLUMNS, &[row(&["bash", "12.3 ms", "ok"]), row(&["x", "1 ms", "MISS"])]);
        assert_eq!(
            text,
            "row       p50\n\
             ────  ───────  ────\n\
             bash  12.3 ms  ok\n\
             x        1 ms  MISS\n"
        );
    }

    #[test]
    fn column_width_counts_characters_not_bytes() {
        let text = render(&COLUMNS, &[row(&["≥ 4 ×", "1"]), row(&["12345", "2"])]);
        assert_eq!(text.lines().nth(2), Some("≥ 4 ×    1"));
        assert_eq!(text.lines().nth(3), Some("12345    2"));
    }

    #[test]
    fn table_without_rows_renders_its_header() {
        assert_eq!(render(&COLUMNS, &[]), "row  p50\n───  ───\n");
    }
}
